// Calls the registered parse functions: reads lines of "<origin type>\t<attribute JSON>", answers each with what was
// recorded, and a line "status\t<number>\t<GE type>\t<framework>".

#include <iostream>
#include <string>

#include "register/register.h"

int main() {
  std::string line;
  while (std::getline(std::cin, line)) {
    const std::size_t tab = line.find('\t');
    const auto found = domi::Registered().find(line.substr(0, tab));
    if (found == domi::Registered().end()) {
      std::cout << "unknown\n";
      continue;
    }
    const ge::Operator source("node", line.substr(tab + 1));
    ge::Operator target("node", "");
    const domi::Status status = found->second.parse_(source, target);
    std::cout << target.Record() << "status\t" << static_cast<int>(status) << '\t' << found->second.om_optype_ << '\t'
              << found->second.framework_ << '\n';
  }
}
