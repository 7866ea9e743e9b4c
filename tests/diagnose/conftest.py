"""One thread: tiny products gain nothing from more."""

from tests.threads import one_thread as one_thread
