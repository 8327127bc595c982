"""Train a ResNet-18 by W-MSE with a loop of your own: python examples/pytorch_loop.py DIR --steps 500

DIR is a folder of images, or of folders of images. The same file runs on several GPUs:
torchrun --nproc_per_node 8 examples/pytorch_loop.py DIR
"""

import argparse
import os

import timm
import torch
import torch.distributed as dist
from torch import nn

from trainer.parts import Normalize, ViewsConfig, WMSELoss, train_views

options = argparse.ArgumentParser()
options.add_argument("folder")
options.add_argument("--split", default=".")
options.add_argument("--steps", type=int, default=500)
options.add_argument("--images", type=int, default=256, help="global batch size, a multiple of 128")
options.add_argument("--size", type=int, default=64)
options.add_argument("--out", default="encoder.pt")
args = options.parse_args()

# One process for each GPU; torchrun tells each process which one it is.
local_rank = int(os.environ.get("LOCAL_RANK", 0))
device = torch.device(f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu")
several = int(os.environ.get("WORLD_SIZE", 1)) > 1
if several:
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

recipe = ViewsConfig(num_views=2, size=args.size, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
torch.manual_seed(0)
encoder = timm.create_model("resnet18", num_classes=0)
projector = nn.Sequential(nn.Linear(512, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 64))
network = nn.Sequential(Normalize(recipe), encoder, projector).to(device, memory_format=torch.channels_last)
model = nn.parallel.DistributedDataParallel(network) if several else network
optimizer = torch.optim.Adam(network.parameters(), lr=2e-3, weight_decay=1e-6)
loss_of = WMSELoss(slice_size=128)

loader = train_views(
    args.folder, recipe, split=args.split, images_per_step=args.images, device=device, end_step=args.steps
)
for batch in loader:
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        embeddings = model(batch.views)
    loss = loss_of(*embeddings.chunk(recipe.num_views))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if batch.step % 10 == 0:
        print(f"step {batch.step}  loss {loss.item():.3f}", flush=True)

if local_rank == 0:
    torch.save(encoder.state_dict(), args.out)
if several:
    dist.destroy_process_group()
