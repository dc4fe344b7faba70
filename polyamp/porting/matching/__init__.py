"""Matching of two models' layers by names, trees and ties, regrouping of attention, and comparison of attributes."""
