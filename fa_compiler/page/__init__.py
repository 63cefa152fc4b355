"""A page that shows what became of the attention of a model: one HTML file that needs no network."""

from fa_compiler.page.page import drawings, page

__all__ = ["drawings", "page"]
