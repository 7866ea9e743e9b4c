"""Many models: what `validate`, `hash` and `diff --base` answer of one, asked of every one found.

`subjects` finds the models, `questions` is the table of what is asked of each, a unit of work is
one question of one model (`units`), `workers` asks them on this machine and `on_ray` on a Ray
cluster, `results` keeps a row for each answer, `summary` says what the rows say together.
"""
