"""One thread: tiny products gain nothing from more, and lose much on a busy machine."""

from tests.threads import one_thread as one_thread
