#!lua flags=allow-oom
-- Hands entries back: guarantees that an entry its caller still holds is claimable at once by anybody, that
-- the caller's nonce is void, and that the delivery does not count as a try. Lost entries are left alone.
--
-- KEYS  for each delivery: stream, claims, tries
-- ARGV  consumer, handback consumer, then for each delivery: group, id, nonce
-- reply the number handed back
local consumer, handback = ARGV[1], ARGV[2]
local count = 0

-- include: held.lua

for i = 1, #KEYS / 3 do
  local stream, claims, tries = KEYS[3 * i - 2], KEYS[3 * i - 1], KEYS[3 * i]
  local group, id, nonce = ARGV[3 * i], ARGV[3 * i + 1], ARGV[3 * i + 2]
  if held(stream, claims, group, id, nonce, consumer) then
    release(stream, claims, tries, group, id, handback)
    count = count + 1
  end
end
return count
