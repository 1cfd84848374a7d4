"""The sidecar's HTTP server, which may be there before its worker and after it."""

from __future__ import annotations

import contextlib
import os
import time

from publisher.config.endpoint import Endpoint
from publisher.config.sidecar_config import ConfigError, WorkerInfo
from publisher.sidecar.web import StatusServer
from publisher.stream.status import SidecarStatus
from publisher.version import VERSION

__all__ = ["Front"]


class Front:
    """Nothing until `open`. `status`: what it shows; of a sidecar that has no worker, until it is set.

    `stays`: whether it is there for the next worker too.
    """

    def __init__(self, *, stays: bool) -> None:
        self.stays = stays
        self._server: StatusServer | None = None
        self.wait()

    def wait(self) -> None:
        """Show that there is no worker."""
        nobody = WorkerInfo(block_size=1)
        self.status = SidecarStatus(nobody, VERSION, os.getpid(), time.time())

    def open(self, http_endpoint: str | None, dp_rank: int, before: str | None) -> None:
        """Listen, unless that has been done or `http_endpoint` is None. `before`: where an earlier run
        listened, for an endpoint that takes any port. Raises ConfigError naming http_endpoint.
        """
        if http_endpoint is None or self._server is not None:
            return
        endpoint = Endpoint.parse_http("http_endpoint", http_endpoint).for_rank(dp_rank)
        if endpoint.is_any and before is not None:
            with contextlib.suppress(ConfigError):
                self._server = StatusServer(before, lambda: self.status)
                return
        self._server = StatusServer(str(endpoint), lambda: self.status)

    @property
    def endpoint(self) -> str | None:
        """Where it listens, the port filled in; None where it does not."""
        return None if self._server is None else self._server.endpoint

    def close(self) -> None:
        """Safe to call twice."""
        if self._server is not None:
            self._server.close()
            self._server = None
