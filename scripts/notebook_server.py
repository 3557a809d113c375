"""Settings of Jupyter for scripts/serve_notebook; they take precedence over the user's own."""

import os
from pathlib import Path

from jupyter_server.auth import PasswordIdentityProvider
from tornado.web import RequestHandler

COLAB = "https://colab.research.google.com"


class EveryOriginIsChecked(PasswordIdentityProvider):
    """Checks the origin also of requests with the token, for which Jupyter skips the check."""

    def should_check_origin(self, handler: RequestHandler) -> bool:
        return True


c = get_config()  # noqa: F821

c.ServerApp.ip = "127.0.0.1"
c.ServerApp.port_retries = 0  # no other port: the tunnel leads to this one
c.ServerApp.open_browser = False
c.ServerApp.allow_root = True
c.ServerApp.allow_remote_access = False
c.ServerApp.root_dir = str(Path(__file__).parents[1])
c.ServerApp.identity_provider_class = EveryOriginIsChecked
c.EveryOriginIsChecked.token = os.environ["JUPYTER_TOKEN"]
c.EveryOriginIsChecked.hashed_password = ""
# Colab's page connects to a local runtime from its own origin, with cookies.
c.ServerApp.allow_origin = COLAB
c.ServerApp.allow_origin_pat = ""
c.ServerApp.allow_credentials = True
c.ServerApp.disable_check_xsrf = False
