"""The paper's theorems (Section 4, Appendix C), each as something that can be computed."""
