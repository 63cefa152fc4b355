// Variables of the environment.
#pragma once

#include <cstdlib>
#include <cstring>
#include <string>

#if defined(_WIN32)
#include <filesystem>

extern "C" __declspec(dllimport) unsigned long __stdcall GetEnvironmentVariableW(const wchar_t*, wchar_t*, unsigned long);
#endif

namespace fa {

// A variable as UTF-8; empty where it is not set. Windows is asked itself: a C runtime has a copy of its own, of which another
// one knows nothing.
inline std::string environment_variable(const char* name) {
#if defined(_WIN32)
  constexpr unsigned long kLongest = 32767;
  const std::wstring wide(name, name + std::strlen(name));
  std::wstring value(kLongest, L'\0');
  value.resize(GetEnvironmentVariableW(wide.c_str(), value.data(), kLongest));
  const std::u8string text = std::filesystem::path(value).u8string();
  return {text.begin(), text.end()};
#else
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
#endif
}

}  // namespace fa
