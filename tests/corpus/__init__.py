"""The corpus: one small file for each bug of the field, re-made on 2 to 4 ranks, and what `colonnade.verify` says of it.

A file has `BUG`, which names the cause that is expected, and `plant(run)`, which makes a healthy run sick.
`python -m tests.corpus` runs all of them and writes their part of docs/evidence/bugs.md; with names, it runs those and prints what was said.
"""
