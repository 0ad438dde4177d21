"""One partition's timers, owned: acquire, then cycles of apply, fence, fire and commit."""
