"""What Jupyter is told by scripts/serve_notebook; it goes before the user's own settings."""

import os
from pathlib import Path

from jupyter_server.auth import PasswordIdentityProvider
from tornado.web import RequestHandler

COLAB = "https://colab.research.google.com"


class EveryOriginIsChecked(PasswordIdentityProvider):
    """Jupyter lets pages of any origin in if they know the token; here they are refused as well."""

    def should_check_origin(self, handler: RequestHandler) -> bool:
        return True


c = get_config()  # noqa: F821

c.ServerApp.ip = "127.0.0.1"
c.ServerApp.port_retries = 0  # the tunnel leads to one port
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
