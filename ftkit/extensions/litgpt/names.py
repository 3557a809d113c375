"""Names of the models that LitGPT knows; no torch."""

from collections.abc import Mapping

from litgpt.config import configs


def spellings() -> Mapping[str, str]:
    """Return ORG/NAME on the hub by every spelling of a name, in lower case."""
    hub_names = [f"{c['hf_config']['org']}/{c['hf_config']['name']}" for c in configs]
    # Users may have misspelt ORG/NAME, NAME alone, or LitGPT's own name.
    found = {hub_name.lower(): hub_name for hub_name in hub_names}
    found |= {hub_name.split("/")[-1].lower(): hub_name for hub_name in hub_names}
    own = zip(configs, hub_names, strict=True)
    return found | {c["name"].lower(): hub_name for c, hub_name in own}
