"""Log progress while a model is loaded, and limit the memory that malloc keeps."""

import logging
import time

from lorax_server.process_tuning import trim_malloc

logger = logging.getLogger(__name__)

LOG_INTERVAL_S = 5.0
# Loading a matrix frees temporary tensors. glibc keeps their memory, which can be as large as the weights.
TRIM_INTERVAL_BYTES, MIN_TRIM_INTERVAL_BYTES = 2**28, 2**23
NUM_TRIMS = 16  # for models that are smaller than 16 intervals


class LoadProgress:
    """Counts the loaded bytes and logs them, at most once per interval.

    It also returns freed memory to the system at regular intervals.
    """

    def __init__(self, total_bytes: int) -> None:
        self._total_bytes = total_bytes
        self._trim_interval_bytes = min(TRIM_INTERVAL_BYTES, max(MIN_TRIM_INTERVAL_BYTES, total_bytes // NUM_TRIMS))
        self._loaded_bytes = self._trimmed_bytes = 0
        self._start_s = self._last_log_s = time.monotonic()

    def add(self, num_bytes: int) -> None:
        """Add the size of a loaded tensor. Log the progress and trim malloc if their intervals have passed."""
        self._loaded_bytes += num_bytes
        if self._loaded_bytes - self._trimmed_bytes >= self._trim_interval_bytes:
            self._trimmed_bytes = self._loaded_bytes
            trim_malloc()
        now_s = time.monotonic()
        if now_s - self._last_log_s >= LOG_INTERVAL_S:
            self._last_log_s = now_s
            loaded, total = self._loaded_bytes / 1e9, self._total_bytes / 1e9
            logger.info("loading weights: %.2f of %.2f GB in %.0f s", loaded, total, now_s - self._start_s)
