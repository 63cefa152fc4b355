"""The operators of GE with which the graph of one rank talks to the graphs of other ranks, by
Ascend's library HCCL.

    operator       input  attributes                      what it does
    -------------  -----  ------------------------------  --------------------------------------------------------------
    HcomAllGather  x      rank_size                       y has the x of all ranks along axis 0, in their order
    HcomAllToAll   x                                      x has a block along axis 0 for each rank, all of one size;
                                                          block r goes to rank r, and y has those that arrive, by rank
    HcomAllReduce  x      reduction                       each element of y is the sum, max or min over the ranks
    HcomSend       x      sr_tag, dest_rank               there is no output
    HcomReceive           sr_tag, src_rank, shape, dtype  y is the x of the HcomSend to this rank that has this tag

Each of them has the attribute `group`. All ranks of the group run the first three. HcomAllGather
and HcomAllReduce have `fusion` and `fusion_id`, too: with `fusion` 0, GE does not merge several of
them into one. Sources: the prototypes of ge_prototypes.py; the shape functions of CANN's
hcom_ops.cc; GE's hccl_engine, whose names for messages tell that `sr_tag`, the two ranks and the
group make a pair.

In ONNX, they are nodes of the domain "ascend" with the names of the prototypes. `dtype` of
HcomReceive is then the number of an ONNX type.
"""

from __future__ import annotations

ALL_GATHER = "HcomAllGather"
ALL_TO_ALL = "HcomAllToAll"
ALL_REDUCE = "HcomAllReduce"
SEND = "HcomSend"
RECEIVE = "HcomReceive"
OPERATORS = (ALL_GATHER, ALL_TO_ALL, ALL_REDUCE, SEND, RECEIVE)

WORLD = "hccl_world_group"
"""The group of all ranks. HCCL makes it from the table of the ranks."""
