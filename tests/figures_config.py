"""What tests give to figures: the config of ``mechattn figures``, and options that a figure needs."""

from inspect import Parameter, signature

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


def needed_options(draw):
    """A quantity, for a figure that needs to be told which."""
    quantity = signature(draw).parameters.get("quantity")
    if quantity is None or quantity.default is not Parameter.empty:
        return {}
    return {"quantity": "span_mass"}
