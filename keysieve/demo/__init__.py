"""``keysieve demo``: a small real model reads a text, keysieve selects, and every selection is verified.

:mod:`keysieve.demo.verify` is numpy only; the rest needs transformers, rich and matplotlib (``pip install
'keysieve[demo]'``) and imports them when it runs.
"""
