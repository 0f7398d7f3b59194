"""Other libraries' names and argument orders over keysieve, so that it can be tried by changing an import.

    from keysieve.compat import deep_gemm   # was: import deep_gemm
    from keysieve.compat import flashinfer  # was: import flashinfer

Each module's docstring says what differs. Code that stays with keysieve is better off with
:class:`keysieve.DecodeIndexer`, which does both steps in one call and skips the logits of short requests.
"""
