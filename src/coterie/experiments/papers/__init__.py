"""Tables and figures of the papers: what they report, as data, and how each is computed anew.

A file `<paper>/<name>.yaml` is one of them (`definition`): rows, columns, reported figures, statements, settings of
each scale. Figures come from finished runs (`reading`, `curves`), timed server steps (`server_times`), computed theory
(`panels`, `fedsee_theory`) or adapters trained for them (`fedsee_geometry`, `fedsee_geometry_training`,
`fedsee_geometry_pictures`); the paper's set-up stands beside ours (`setting`), its statements are tested on ours
(`claims`), and all is written as Markdown (`writing`). `coterie.experiments.reproduce` puts these together.
"""
