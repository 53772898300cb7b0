"""The parts of scripts/validation.py: the runs, the layer's settings and log, the allow-list, the verdict."""
