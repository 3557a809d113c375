"""What type checkers and editors see of `import ftkit`, which imports nothing before it is used."""

from ftkit.comparison.compare import compare as compare
from ftkit.errors import DoesNotFit as DoesNotFit
from ftkit.errors import UserError as UserError
from ftkit.notebook.answers import Chat as Chat
from ftkit.notebook.answers import chat as chat
from ftkit.notebook.answers import generate as generate
from ftkit.notebook.api import Run as Run
from ftkit.notebook.api import attach as attach
from ftkit.notebook.api import finetune as finetune
from ftkit.notebook.api import finetune_full as finetune_full
from ftkit.notebook.experiments import Experiments as Experiments
from ftkit.notebook.plans import Plans as Plans
from ftkit.notebook.plans import plan as plan
from ftkit.notebook.previews import preview as preview
from ftkit.notebook.results import evaluate as evaluate
from ftkit.notebook.results import export as export
from ftkit.notebook.results import merge as merge
from ftkit.notebook.results import push as push

__all__: list[str]
__version__: str
