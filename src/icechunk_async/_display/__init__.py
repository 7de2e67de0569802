"""Cards of values for terminals and notebooks, and whole HTML pages.

Names and messages in them were written by others: all of them go through `cards.literal`, or
`printable` where they are text.
"""
