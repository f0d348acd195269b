"""FedSEE's theory, computed: the shared-feature squared-loss model and every statement of it that has a number.

`geometry` has experts, mixtures and their geometry, `reconstruction` how well experts reconstruct clients' updates
(Appendix B.2); `synthetic` the federation of Appendix B.1.1; `extraction` the convex programs for experts and mixtures;
`pool_only` what uploads alone tell. The statements are functions that return what they bound beside the bound
(`Statement`): `recovery` (Theorems 1 to 4, Remark 1, Propositions 2 to 5, 11, 12, Corollaries 1, 2), `routing` (Theorem
5, Propositions 1, 6, 7, Corollaries 3 to 7), `general_loss` (Theorems 6, 7, Proposition 9, Corollary 8). `task_count`,
which is not the paper's, estimates how many tasks a pool has.
"""

from coterie.theory.fedsee.counting import TaskCount, task_count
from coterie.theory.fedsee.extraction import extract, extract_balanced, mixtures
from coterie.theory.fedsee.geometry import Statement
from coterie.theory.fedsee.synthetic import world

__all__ = ["Statement", "TaskCount", "extract", "extract_balanced", "mixtures", "task_count", "world"]
