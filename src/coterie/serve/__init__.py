"""Using what a run, an export or PEFT left: `load` gives a `Predictor`."""

from coterie.serve.loading import load
from coterie.serve.predictor import Predictor

__all__ = ["Predictor", "load"]
