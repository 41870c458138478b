"""What a layout costs, before it is run: closed formulas, a search over layouts, drawings. No torch here."""
