// The text that this library was made of, so that a test can tell whether it is that of today.
extern "C" __attribute__((visibility("default"))) const char* digest() { return DIGEST; }
