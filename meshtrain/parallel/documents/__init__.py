"""Packed documents: attention computes each one alone, without the pairs that a mask throws away.

attention: attention to one part of the tokens after the other, or to all parts by one kernel.
mask: what goes through the layers instead of a mask of all pairs of a row.
proof: whether a class can compute like this, found by a tiny copy.
ranges: parts of a tensor whose gradients are added up in one tensor.
segments: the documents of a microbatch, and the parts of them.
"""
