"""When computed KV is given to the wire: at once, chunk by chunk, or all at the end. Knows neither engine nor wire.

    layerwise   a layer of a chunk, as soon as it is computed: it travels while the next layer is computed
    chunkwise   all layers of a chunk, when its last layer is computed
    whole       everything, when the last chunk is computed

What travels is the same bytes in all three. The first is what serves; the others show what it gains.
"""

from __future__ import annotations

from collections.abc import Callable

GiveRange = Callable[[int, int, int], None]  # layer, token start, token stop


class Release:
    """One prompt's. `give` gets each computed range once. `mode` is one of pdserve.config.TRANSFER_MODES."""

    def __init__(self, mode: str, layer_count: int, give: GiveRange) -> None:
        self._give = give
        self._last_layer = layer_count - 1
        self._mode = mode
        self._held: list[tuple[int, int, int]] = []

    def computed(self, layer: int, start: int, stop: int) -> None:
        """The KV of tokens [start, stop) of a layer is there; the layers of a chunk come in order."""
        self._held.append((layer, start, stop))
        if self._mode == "layerwise" or (self._mode == "chunkwise" and layer == self._last_layer):
            self.finish()

    def finish(self) -> None:
        """No more will be computed: give what is held back."""
        for part in self._held:
            self._give(*part)
        self._held.clear()
