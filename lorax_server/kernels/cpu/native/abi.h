// The interface to Python. The macros export each declaration as text, which `cpu/abi.py` compares at load time:
// a mismatched argument or field raises an error instead of corrupting memory.

#define CONCAT_EXPANDED(a, b) a##_##b
#define CONCAT(a, b) CONCAT_EXPANDED(a, b)
#define VISIBLE __attribute__((visibility("default")))
#define DECLARE(name, ...) \
  extern "C" { VISIBLE const char* CONCAT(declaration_##name, ISA) = #__VA_ARGS__; }

#define STRUCT(name, ...) DECLARE(name, __VA_ARGS__) struct name { __VA_ARGS__ }
#define ENUM(name, ...) DECLARE(name, __VA_ARGS__) enum name : int32_t { __VA_ARGS__ }

template <auto kernel>
struct Kernel;
template <class... A, void (*kernel)(A...)>
struct Kernel<kernel> {
  // Entry point for Python. Returns 1 if an allocation failed, since exceptions must not reach Python.
  static int call(A... arguments) {
    try {
      kernel(arguments...);
      return 0;
    } catch (const std::bad_alloc&) {
      return 1;
    }
  }

  // Entry point for graphs: arguments are 64-bit words.
  static void call_words(const int64_t* words) { call_words(words, std::index_sequence_for<A...>()); }

 private:
  template <size_t... I>
  static void call_words(const int64_t* words, std::index_sequence<I...>) {
    kernel(read_word<A>(words + I)...);
  }

  template <class T>
  static T read_word(const int64_t* word) {
    static_assert(sizeof(T) <= sizeof(int64_t), "a word holds each argument");
    T argument;
    memcpy(&argument, word, sizeof(T));
    return argument;
  }
};

// Define a kernel: EXPORT(name, parameters) { body }
#define EXPORT(name, ...)                                                              \
  DECLARE(name, __VA_ARGS__)                                                           \
  extern "C" void CONCAT(name, ISA)(__VA_ARGS__);                                        \
  extern "C" {                                                                         \
  VISIBLE void* CONCAT(guarded_##name, ISA) = (void*)&Kernel<&CONCAT(name, ISA)>::call;     \
  VISIBLE void* CONCAT(words_##name, ISA) = (void*)(void (*)(const int64_t*)) & Kernel<&CONCAT(name, ISA)>::call_words; \
  }                                                                                    \
  extern "C" void CONCAT(name, ISA)(__VA_ARGS__)
