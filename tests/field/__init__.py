"""Cases from the field: what went wrong in other implementations of this step, each held as a whole kind of fault."""
