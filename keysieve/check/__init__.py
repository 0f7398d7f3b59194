"""Exactness on this machine: random and adversarial cases against an independent brute force, for as long as asked.

``keysieve check`` is the command; :func:`keysieve.check.runner.run_cases` is the same for programs.
"""
