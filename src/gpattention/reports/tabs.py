"""Tabs: one panel of several, by mouse, arrow keys or, without scripts and on paper, all of them."""

from collections.abc import Mapping

from gpattention.reports.markup import Safe, join, tag


def tabs(name: str, label: str, panels: Mapping[str, Safe]) -> Safe:
    """One tab per panel; a single panel stands by itself."""
    if len(panels) < 2:
        return join(*panels.values())
    buttons = (
        tag(
            "button", title, role="tab", id=f"{name}-tab-{i}", type="button",
            aria_controls=f"{name}-panel-{i}", aria_selected="true" if i == 0 else "false",
            tabindex=0 if i == 0 else -1,
        )
        for i, title in enumerate(panels)
    )  # fmt: skip
    bodies = (
        tag(
            "div", tag("h4", title, class_="panel-title"), panel, role="tabpanel", id=f"{name}-panel-{i}",
            aria_labelledby=f"{name}-tab-{i}", class_="panel",
        )
        for i, (title, panel) in enumerate(panels.items())
    )  # fmt: skip
    return tag(
        "div",
        tag("div", *buttons, role="tablist", aria_label=label, class_="tablist"),
        *bodies,
        class_="tabs",
    )
