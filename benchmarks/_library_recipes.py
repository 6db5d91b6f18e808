"""Published architectures on which library passes are measured, as their authors write them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks._library_models import Case


class InputEmbedder(nn.Module):
    """The input embedder of AlphaFold 2 (algorithms 3 and 4 of its supplement), and a transition over pairs.

    Residues are one-hot over 21 kinds, relative positions one-hot over 65.
    """

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.left, self.right, self.single = (nn.Linear(21, width) for _ in range(3))
        self.relative = nn.Linear(65, width)
        self.norm = nn.LayerNorm(width)
        self.transition = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))

    def forward(self, kinds: Tensor, positions: Tensor) -> Tensor:
        residues = F.one_hot(kinds, 21).to(self.norm.weight.dtype)
        distance = (positions[:, :, None] - positions[:, None]).clamp(-32, 32) + 32
        pairs = self.relative(F.one_hot(distance, 65).to(self.norm.weight.dtype))
        pairs = pairs + self.left(residues)[:, :, None] + self.right(residues)[:, None]
        pairs = pairs + self.transition(self.norm(pairs))
        return pairs.mean(2) + self.single(residues)


class GraphAutoencoder(nn.Module):
    """DOMINANT (Ding et al. 2019): two graph convolutions, and one that reconstructs the attributes.

    Graph convolutions are written as by Kipf: ``adjacency @ (features @ weight)``.
    """

    def __init__(self, features: int = 1433, width: int = 64) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(features, width) * 0.02)
        self.second = nn.Parameter(torch.randn(width, width) * 0.1)
        self.back = nn.Parameter(torch.randn(width, features) * 0.1)

    def forward(self, features: Tensor, adjacency: Tensor) -> Tensor:
        hidden = F.relu(adjacency @ (features @ self.first))
        hidden = F.relu(adjacency @ (hidden @ self.second))
        return F.mse_loss(F.relu(adjacency @ (hidden @ self.back)), features)


class DeepSDF(nn.Module):
    """DeepSDF (Park et al. 2019): eight layers over points; the shape code enters layers one and five."""

    def __init__(self, code: int = 256, width: int = 512) -> None:
        super().__init__()
        sizes = [code + 3, width, width, width - code - 3, width, width, width, width, 1]
        inputs = [code + 3, width, width, width, width, width, width, width]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(inputs, sizes[1:], strict=True))

    def forward(self, points: Tensor, code: Tensor) -> Tensor:
        given = torch.cat([code[:, None].expand(-1, points.shape[1], -1), points], -1)
        x = given
        for number, layer in enumerate(self.layers):
            if number == 3:
                x = torch.cat([x[..., : layer.in_features - given.shape[-1]], given], -1)
            x = layer(x)
            if number < len(self.layers) - 1:
                x = F.relu(x)
        return x.tanh()


class RelationNetwork(nn.Module):
    """Relation networks (Santoro et al. 2017): four layers over object pairs and a question, then three."""

    def __init__(self, objects: int = 26, question: int = 128, width: int = 256) -> None:
        super().__init__()
        self.pair = nn.Sequential(
            nn.Linear(2 * objects + question, width), nn.ReLU(),
            *(m for _ in range(3) for m in (nn.Linear(width, width), nn.ReLU())),
        )  # fmt: skip
        self.answer = nn.Sequential(
            nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 28)
        )

    def forward(self, objects: Tensor, question: Tensor) -> Tensor:
        batch, count, width = objects.shape
        left = objects[:, :, None].expand(batch, count, count, width)
        right = objects[:, None].expand(batch, count, count, width)
        asked = question[:, None, None].expand(batch, count, count, question.shape[1])
        return self.answer(self.pair(torch.cat([left, right, asked], -1)).sum((1, 2)))


class Captioner(nn.Module):
    """The decoder of Show, Attend and Tell (Xu et al. 2015): soft attention, given the caption's words."""

    def __init__(self, features: int = 512, width: int = 512, vocabulary: int = 5000) -> None:
        super().__init__()
        self.token, self.logits = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.keys, self.query, self.score = (
            nn.Linear(features, width),
            nn.Linear(width, width),
            nn.Linear(width, 1),
        )
        self.gate, self.cell = nn.Linear(width, features), nn.LSTMCell(width + features, width)
        self.first_h, self.first_c = nn.Linear(features, width), nn.Linear(features, width)

    def forward(self, features: Tensor, caption: Tensor) -> Tensor:
        mean = features.mean(1)
        h, c = self.first_h(mean), self.first_c(mean)
        logits = []
        for word in self.token(caption[:, :-1]).unbind(1):
            scores = self.score(F.relu(self.keys(features) + self.query(h)[:, None]))
            seen = (scores.softmax(1) * features).sum(1) * self.gate(h).sigmoid()
            h, c = self.cell(torch.cat([word, seen], 1), (h, c))
            logits.append(self.logits(h))
        return F.cross_entropy(torch.stack(logits, 1).flatten(0, 1), caption[:, 1:].flatten())


class RecurrentLanguageModel(nn.Module):
    """The medium model of Zaremba et al. (2014): two LSTM layers of 650 with dropout, 10,000 words."""

    def __init__(self, width: int = 650, vocabulary: int = 10_000) -> None:
        super().__init__()
        self.token, self.logits = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.cells = nn.ModuleList(nn.LSTMCell(width, width) for _ in range(2))
        self.dropout = nn.Dropout(0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        zeros = self.token.weight.new_zeros(len(tokens), self.token.embedding_dim)
        states = [(zeros, zeros) for _ in self.cells]
        outputs = []
        for x in self.token(tokens[:, :-1]).unbind(1):
            for layer, cell in enumerate(self.cells):
                states[layer] = cell(self.dropout(x), states[layer])
                x = states[layer][0]
            outputs.append(self.dropout(x))
        return F.cross_entropy(self.logits(torch.stack(outputs, 1)).flatten(0, 1), tokens[:, 1:].flatten())


class MeshGraphNet(nn.Module):
    """The processor of MeshGraphNets (Pfaff et al. 2021): layers on the edges and nodes of a mesh."""

    def __init__(self, width: int = 128, blocks: int = 3) -> None:
        super().__init__()
        self.edges = nn.ModuleList(_mesh_layers(3 * width, width) for _ in range(blocks))
        self.nodes = nn.ModuleList(_mesh_layers(2 * width, width) for _ in range(blocks))

    def forward(self, x: Tensor, edges: Tensor, source: Tensor, target: Tensor) -> Tensor:
        for of_edges, of_nodes in zip(self.edges, self.nodes, strict=True):
            edges = edges + of_edges(torch.cat([x[source], x[target], edges], -1))
            received = torch.zeros_like(x).index_add(0, target, edges)
            x = x + of_nodes(torch.cat([x, received], -1))
        return x


def _mesh_layers(inputs: int, width: int) -> nn.Module:
    layers = [nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.LayerNorm(width)]
    return nn.Sequential(*layers)


class EdgeConvolutions(nn.Module):
    """The first two layers of DGCNN (Wang et al. 2019): layers on points and their nearest neighbours."""

    def __init__(self, neighbours: int = 20) -> None:
        super().__init__()
        self.neighbours = neighbours
        self.layers = nn.ModuleList(nn.Conv2d(n, 64, 1, bias=False) for n in (6, 128))
        self.norms = nn.ModuleList(nn.BatchNorm2d(64) for _ in self.layers)

    def forward(self, points: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            count, channels = points.shape[2], points.shape[1]
            rows = points.transpose(1, 2)
            nearest = torch.cdist(rows, rows).topk(self.neighbours, largest=False)[1]
            start = torch.arange(len(points))[:, None, None] * count
            others = rows.reshape(-1, channels)[(nearest + start).flatten()].view(*nearest.shape, channels)
            own = rows[:, :, None].expand_as(others)
            pairs = torch.cat([others - own, own], -1).permute(0, 3, 1, 2)
            points = F.leaky_relu(norm(layer(pairs)), 0.2).amax(-1)
        return points


def _mesh(nodes: int = 1000, edges: int = 6000, width: int = 128) -> tuple[Tensor, ...]:
    ends = torch.randint(nodes, (2, edges))
    return torch.randn(nodes, width), torch.randn(edges, width), ends[0], ends[1]


def _captioner(batch: int, steps: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Captioner(), (torch.randn(batch, 49, 512), torch.randint(5000, (batch, steps + 1)))


def _recurrent(batch: int, steps: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return RecurrentLanguageModel(), (torch.randint(10_000, (batch, steps + 1)),)


_WHOLE = {"regions": "off"}
_LOOPS = (
    Case("Show, Attend and Tell, 16 captions of 20, training", lambda: _captioner(16, 20), options=_WHOLE),
    Case("LSTM language model, 20 x 20 tokens, training", lambda: _recurrent(20, 20), options=_WHOLE),
)


def _kinds(batch: int, length: int) -> tuple[Tensor, Tensor]:
    return torch.randint(21, (batch, length)), torch.arange(length).expand(batch, length).contiguous()


def _graph(nodes: int = 512, features: int = 1433) -> tuple[Tensor, Tensor]:
    adjacency = (torch.rand(nodes, nodes) < 0.02).float() + torch.eye(nodes)
    return (torch.rand(nodes, features) < 0.02).float(), adjacency / adjacency.sum(1, keepdim=True)


RECIPES: dict[str, tuple[Case, ...]] = {
    "concat_matmuls": _LOOPS,
    "fuse_matmul_sums": _LOOPS,
    "replace_one_hot_matmul": (
        Case("AlphaFold 2's input embedder, 96 residues, training", lambda: (InputEmbedder(), _kinds(1, 96))),
        Case("the same, inference", lambda: (InputEmbedder(), _kinds(1, 96)), training=False),
    ),
    "reassociate_matmuls": (
        Case("graph autoencoder, 512 nodes, 1433 features, training", lambda: (GraphAutoencoder(), _graph())),
        Case("the same, inference", lambda: (GraphAutoencoder(), _graph()), training=False),
    ),
    "move_matmul_before_broadcast": (
        Case(
            "DeepSDF, 2 shapes, 1024 points, training",
            lambda: (DeepSDF(), (torch.randn(2, 1024, 3), torch.randn(2, 256))),
        ),
        Case(
            "relation network, 4 x 25 objects, training",
            lambda: (RelationNetwork(), (torch.randn(4, 25, 26), torch.randn(4, 128))),
        ),
    ),
    "move_matmul_before_gather": (
        Case(
            "MeshGraphNets, 3 blocks, 6000 edges, inference",
            lambda: (MeshGraphNet(), _mesh()),
            training=False,
        ),
        Case(
            "DGCNN, 2 layers, 2 x 512 points, inference",
            lambda: (EdgeConvolutions().eval(), (torch.randn(2, 3, 512),)),
            training=False,
        ),
    ),
}
