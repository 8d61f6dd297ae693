"""Known answers: tests of the library on models whose heads, patterns or texts are known beforehand."""
