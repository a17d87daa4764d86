"""Planted bugs: does the suite catch each of them?"""
