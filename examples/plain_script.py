"""The engine alone, without the launcher: a model of the bytes of a source file, on any number of processes.

    python examples/plain_script.py                                   # one process
    torchrun --nproc-per-node 2 examples/plain_script.py model.pt     # two; the whole model is saved at the end

docs/engine.md has the same script before it was sharded, and the lines that differ.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from fsdp_core import clip_grad_norm_, flat_parameters, fully_shard, state_dict


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
if torch.cuda.is_available():
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
if world_size > 1:
    dist.init_process_group()
device = "cuda" if torch.cuda.is_available() else "cpu"
text = torch.tensor(list(Path(torch.__file__).read_bytes()))
torch.manual_seed(0)  # the same model and the same batches on every rank
model = nn.Sequential(nn.Embedding(256, 64), nn.Flatten(), nn.Linear(512, 64), Block(64), Block(64), nn.Linear(64, 256))
fully_shard(model, units=[Block])
optimizer = torch.optim.AdamW(flat_parameters(model), lr=3e-3, fused=True)

for step in range(100):
    starts = torch.randint(len(text) - 8, (64,))[rank::world_size]  # this rank's share of the batch
    context = torch.stack([text[i : i + 8] for i in starts]).to(device)
    loss = cross_entropy(model(context), text[starts + 8].to(device))
    loss.backward()
    clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % 20 == 19 and rank == 0:
        print(f"step {step + 1}: loss {loss.item():.3f}")

state = state_dict(model, rank0_only=True)
if rank == 0 and sys.argv[1:]:
    torch.save(state, sys.argv[1])
if world_size > 1:
    dist.destroy_process_group()
