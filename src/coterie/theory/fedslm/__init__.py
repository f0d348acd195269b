"""FedSLM's theory (arXiv 2607.29071, Section IV and Appendix A) as functions of bound and measured value.

`subspaces`: Definitions 1 to 3, Proposition 1, Lemmas 3 and 6. `misalignment`: Propositions 2, 5, 6 and 7, exactly on a
quadratic. `aggregation`: Theorems 2 and 3. `weak_to_strong`: Lemma 1, Propositions 3 and 4. `allocation`: ranks of
layers and clients from spectra, which the paper suggests.
"""
