"""One of two ranks that share a model and would not choose the same tokens.

`python answering_ranks.py BASE OUT STORE RANK EOS`: rank 1 takes the least likely tokens. Writes
the answer of each rank to OUT-RANK.json.
"""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

from ftkit.utils.process import die_with_parent

TIMEOUT_S = 20

if __name__ == "__main__":
    die_with_parent(os.getppid())
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from ftkit.models.generation import answer_greedily
    from ftkit.models.language_model import outline
    from ftkit.models.load_weights import fill
    from ftkit.models.pretrained.base_model import open_base
    from ftkit.recipe.devices import Devices
    from ftkit.recipe.parsing import read_recipe
    from ftkit.recipe.plan import make_plan
    from ftkit.strategies.fully_shard import FullyShard

    directory, out, store, rank, eos_id = sys.argv[1], sys.argv[2], sys.argv[3], *map(
        int, sys.argv[4:]
    )  # fmt: skip
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    keys = {"checkpoint_dir": directory, "precision": "32-true", "strategy": "fsdp", "devices": "2"}
    recipe = read_recipe([], list(keys.items()), method="full")
    plan = make_plan(recipe, Devices(accelerator="cpu", count=2))
    base = open_base(directory)
    model = outline(base, recipe, torch.float32)
    fill(
        model,
        base,
        sharding=FullyShard(plan, init_device_mesh("cpu", (2,))),
        device=torch.device("cpu"),
        rope_length=base.architecture.context_length,
        seed=0,
        progress=lambda done, total: None,
    )
    if rank == 1:
        model.register_forward_hook(lambda module, inputs, logits: -logits)
    (answer,) = answer_greedily(
        model.eval(), [torch.tensor([0, 20, 30, 40, 50])], stop_ids=[eos_id], max_new_tokens=12
    )
    Path(f"{out}-{rank}.json").write_text(json.dumps(answer.tolist()))
    dist.destroy_process_group()
    os._exit(0)  # threads of gloo that end with Python have aborted it at times
