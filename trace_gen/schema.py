"""The tables of a trace, versioned. Positions are indices in the generation region, 0 to L - 1."""

import pyarrow as pa

SCHEMA_VERSION = 1

# One row a finished trajectory, of either kind.
TRAJECTORIES = pa.schema(
    {
        "trajectory": pa.int32(),  # index of the problem in the split, counts from 0
        "id": pa.string(),  # the problem's id
        "prompt": pa.list_(pa.int32()),  # token ids
        "tokens": pa.list_(pa.int32()),  # final token of each position
        "committed_at": pa.list_(pa.int16()),  # step that committed it; -1: filled by the stop rule
        "block": pa.list_(pa.int16()),  # block in which it was committed; -1 likewise
        "nfe": pa.int32(),
    }
)

# kind=replay: one row a step of a trajectory; the lists run over the masked positions of the active block, in order.
STEPS = pa.schema(
    {
        "trajectory": pa.int32(),
        "step": pa.int16(),
        "block": pa.int16(),
        "block_size": pa.int16(),  # positions of the block, committed ones included
        "position": pa.list_(pa.int16()),
        "rank": pa.list_(pa.int16()),  # rank among the block's positions
        "top1": pa.list_(pa.int32()),
        "confidence": pa.list_(pa.float32()),
        "second": pa.list_(pa.float32()),
        "entropy": pa.list_(pa.float32()),  # nats
        "margin": pa.list_(pa.float32()),  # of logits
        "right": pa.list_(pa.bool_()),  # top1 equals the final token
        "stable": pa.list_(pa.bool_()),  # right here and at every later step until committed
    }
)

# kind=masked: one row a (trajectory, ratio); the lists run over all masked positions, in order.
MASKED = pa.schema(
    {
        "trajectory": pa.int32(),
        "ratio": pa.float32(),  # share of the generation region that is masked
        "position": pa.list_(pa.int16()),
        "top1": pa.list_(pa.int32()),
        "entropy": pa.list_(pa.float32()),  # nats
        "loss": pa.list_(pa.float32()),  # cross-entropy of the response's token, nats
        "right": pa.list_(pa.bool_()),  # top1 equals the response's token
    }
)

ROWS = {"replay": STEPS, "masked": MASKED}
