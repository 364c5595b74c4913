from fake_runs import make_comparison_fixture, make_view_fixture

__all__ = ["make_comparison_fixture", "make_view_fixture"]
