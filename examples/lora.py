"""A pre-trained transformer, personalised with LoRA: the backbone is frozen, and a few percent of the model are sent.

An image of the embedded digits is read as a text of eight words, its rows. The first 600 images are public, and the
transformer is trained on them for a moment; the others belong to 12 clients, each with its own mixture of digits.
"""

import torch
from torch import nn
from torch.nn import functional as F

import sparsona as sp
from sparsona.data.read import read

PUBLIC, WIDTH = 600, 64


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        y = self.norm1(x)
        scores = self.query(y) @ self.key(y).transpose(1, 2) / WIDTH**0.5
        x = x + self.out(scores.softmax(-1) @ self.value(y))
        return x + self.narrow(F.gelu(self.wide(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Linear(8, WIDTH), nn.Parameter(torch.randn(8, WIDTH) / 8)
        self.blocks, self.head = nn.Sequential(Block(), Block()), nn.Linear(WIDTH, 10)

    def forward(self, images):
        return self.head(self.blocks(self.words(images.flatten(1, 2)) + self.places).mean(1))


class LoRALinear(nn.Module):
    """A frozen layer and a trained change of low rank: base(x) + B(A(x))."""

    def __init__(self, base: nn.Linear, rank: int = 4):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.A, self.B = nn.Linear(base.in_features, rank, bias=False), nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.B.weight)  # at first, nothing is changed

    def forward(self, x):
        return self.base(x) + self.B(self.A(x))


torch.manual_seed(0)
digits = read("digits", [])
x, y = torch.from_numpy(digits.x), torch.from_numpy(digits.y)

net = Transformer()  # stands for what you downloaded
optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
for _ in range(15):
    for batch in torch.randperm(PUBLIC).split(50):
        optimizer.zero_grad()
        F.cross_entropy(net(x[batch]), y[batch]).backward()
        optimizer.step()

federation = sp.federate(x[PUBLIC:], y[PUBLIC:], clients=12, partition="dirichlet:0.3", name="digits")
same = {"rounds": 6, "epochs": 1, "optimizer": "adamw", "lr": 0.003, "batch_size": 32, "seed": 0, "executor": "serial"}
everything = sp.train("fedavg-ft", federation, net, **same)

lora = Transformer().requires_grad_(False)
lora.load_state_dict(net.state_dict())
for block in lora.blocks:
    block.query, block.value = LoRALinear(block.query), LoRALinear(block.value)
lora.head.requires_grad_(True)
# As in FedSA-LoRA: A is learned together, B and the head are each client's own.
partly = sp.train("fedalt", federation, lora, personal=["*.B.weight", "head.*"], **same)

for name, run, model in (("FedAvg-FT of everything", everything, net), ("FedAlt of LoRA parts", partly, lora)):
    sent = run.summary["bytes"]["paper_up"] / run.summary["turns"]["rounds"] / 4
    share = sent / sum(parameter.numel() for parameter in model.parameters())
    print(f"{name}: {run.accuracies().mean():.1%} correct, a client sends {share:.1%} of the model in a round")
