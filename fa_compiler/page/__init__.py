"""A page that shows what became of the attention of a model: one HTML file that needs no network."""

from fa_compiler.page.page import page

__all__ = ["page"]
