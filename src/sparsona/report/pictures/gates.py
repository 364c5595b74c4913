"""The picture of gates over the rounds: how many blocks have which gate (pFedGate, figure 7)."""

from __future__ import annotations

from sparsona.analysis.gates import Gates
from sparsona.report.pictures.figure import Picture, add_scale, heat_map, mark_whole, new_picture, style


def draw_gates(gates: Gates) -> Picture:
    """A column for each recorded round, a row for each range of gates, coloured by its share of the blocks."""
    with style():
        picture = new_picture(gates.title, gates.sentences(), 4.6)
        axes = picture.figure.subplots()
        rounds, edges, counts = gates.histogram()
        shares = counts / counts.sum(axis=1, keepdims=True)
        extent = (-0.5, len(rounds) - 0.5, float(edges[0]), float(edges[-1]))
        image = axes.imshow(
            shares.T, heat_map(), aspect="auto", interpolation="none", extent=extent, origin="lower", vmin=0
        )
        add_scale(picture, image, axes, "share of the blocks of all clients that trained", format="{x:.0%}")
        mark_whole(axes.xaxis, len(rounds), [f"{completed:,}" for completed in rounds], most=20)
        axes.set_xlabel("completed rounds")
        axes.set_ylabel("gate of a block")
        texts = []
        for completed, row in zip(rounds, shares, strict=True):
            held = [f"{edges[k]:.2f} to {edges[k + 1]:.2f}: {share:.0%}" for k, share in enumerate(row) if share > 0]
            texts.append(f"round {completed}\n" + "\n".join(held))
        picture.hint_bands(axes, texts, are_columns=True)
        return picture
