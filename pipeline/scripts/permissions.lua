#!lua flags=no-writes
-- Says which commands this user may not run; runs none of them.
--
-- ARGV  commands with their arguments, separated by spaces
-- returns the places of the refused ones, counted from 1

local refused = {}
for place, command in ipairs(ARGV) do
  local words = {}
  for word in string.gmatch(command, '%S+') do
    words[#words + 1] = word
  end
  if not redis.acl_check_cmd(unpack(words)) then
    refused[#refused + 1] = place
  end
end
return refused
