"""The config of ``mechattn figures`` from a few options, as its command builds it."""

from mechattn.toml_sections import config_from_values


def figures_config(out, models, source, limit, layer, heads, inserted=None, **options):
    """A checked config, with the page and the results in one folder."""
    return config_from_values(
        {
            "model": models,
            "prompts": {"source": source, "limit": limit},
            "conditions": {"slash": {"kind": "MeaninglessTokens", **(inserted or {})}},
            "output": {
                "result": str(out / "{model}.zarr"), "page": str(out / "index.html"), "layer": layer, "heads": heads,
            },
            **options,
        }
    )  # fmt: skip
