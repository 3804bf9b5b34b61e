"""Log progress while a model is loaded."""

import logging
import time

logger = logging.getLogger(__name__)

LOG_INTERVAL_S = 5.0


class LoadProgress:
    """Counts the loaded bytes and logs them, at most once per interval."""

    def __init__(self, total_bytes: int) -> None:
        self._total_bytes = total_bytes
        self._loaded_bytes = 0
        self._start_s = self._last_log_s = time.monotonic()

    def add(self, num_bytes: int) -> None:
        """Add the size of a loaded tensor, and log the progress if the interval has passed."""
        self._loaded_bytes += num_bytes
        now_s = time.monotonic()
        if now_s - self._last_log_s >= LOG_INTERVAL_S:
            self._last_log_s = now_s
            loaded, total = self._loaded_bytes / 1e9, self._total_bytes / 1e9
            logger.info("loading weights: %.2f of %.2f GB in %.0f s", loaded, total, now_s - self._start_s)
