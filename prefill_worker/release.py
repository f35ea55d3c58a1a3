"""When computed KV is given to the wire: at once, chunk by chunk, or all at the end. Knows neither engine nor wire.

    layerwise   a layer of a chunk, as soon as it is computed: it travels while the next layer is computed
    chunkwise   all layers of a chunk, when its last layer is computed
    whole       everything, when the last layer of the last token is computed

What travels is the same bytes in all three. The first is what serves; the others show what it gains.
"""

from __future__ import annotations

from collections.abc import Callable

GiveRange = Callable[[int, int, int], None]  # layer, token start, token stop


class Release:
    """One prompt's, of `token_stop` tokens. `give` gets each computed range once. `mode` is one of
    pdserve.config.TRANSFER_MODES."""

    def __init__(self, mode: str, layer_count: int, token_stop: int, give: GiveRange) -> None:
        self._give = give
        self._last_layer = layer_count - 1
        self._token_stop = token_stop
        self._mode = mode
        self._held: list[tuple[int, int, int]] = []

    def completes(self, layer: int, stop: int) -> bool:
        """Whether nothing is left to compute after the tokens up to `stop` of this layer."""
        return layer == self._last_layer and stop == self._token_stop

    def computed(self, layer: int, start: int, stop: int) -> None:
        """The KV of tokens [start, stop) of a layer is there; the layers of a chunk come in order."""
        self._held.append((layer, start, stop))
        chunk_done = self._mode == "chunkwise" and layer == self._last_layer
        if self._mode == "layerwise" or chunk_done or self.completes(layer, stop):
            for part in self._held:
                self._give(*part)
            self._held.clear()
