"""The papers' statements as functions of what can be measured."""
