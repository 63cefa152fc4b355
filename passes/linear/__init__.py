"""Attention by a state that each token changes. `fuse_linear` finds and proves it, and makes one
operator of it (fuse.py).

    regions.py                             the regions of a graph that may be one
    evaluation.py                          a region at a random point modulo a prime, by the rules
                                           of operators.py, with the arithmetic of field.py and the
                                           tensors of tensors.py
    search.py, candidates.py               which values are the operands; corrections.py finds those
                                           of rank one, and resets.py the truth values by which
                                           states become 0
    arrangement.py, powers.py              in which order the axes of operands lie; constant tables
                                           of decays
    recurrence.py, proof.py                the recurrence, and the proof that the region computes it
    lengths.py, meetings.py, walk.py       for which lengths this holds, by the numbers that a
                                           length meets, and by what is computed of each length;
                                           columns.py computes it for all lengths at once
    equal.py                               equal regions are proven once
    emit.py                                the operator and its operands
"""
