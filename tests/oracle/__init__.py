"""An independent brute force for everything the contract fixes in bits.

Plain Python and NumPy, one key at a time where that is affordable, written from the contract's text and sharing no
code with the package: decoding of every format, both numerics, key16, selection, physical rows. Tests hold the
package to it.
"""
