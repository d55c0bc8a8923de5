"""Training scripts with one planted mistake each, for `colonnade verify`; tests/corpus/scripted.py has their causes."""
