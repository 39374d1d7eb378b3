#!lua flags=allow-oom
-- Takes credits back that nobody will give back: guarantees that every credit that was looked at belongs to a request
-- that goes on, under this attempt and in this pool. An end gives its credit back in the same step, so there should be
-- none; a server that lost its last second may have kept a credit longer than its request.
--
-- KEYS  credits
-- ARGV  what the names of requests begin with, cursor, number of credits to look at
-- reply { cursor to go on with, '0' at the end; number of credits taken back }
local credits = KEYS[1]
local requests, cursor, count = ARGV[1], ARGV[2], ARGV[3]

-- include: ending.lua

local function goes_on(id, credit)
  local request = redis.pcall('HMGET', requests .. id, 'state', 'attempt', 'credits')
  if request.err or not request[1] or ENDED[request[1]] then
    return false
  end
  return request[2] == string.match(credit, '^(%d+):%d+') and request[3] == credits
end

local page, num_taken = redis.call('HSCAN', credits, cursor, 'COUNT', count), 0
for i = 1, #page[2], 2 do
  local id, credit = page[2][i], page[2][i + 1]
  if not goes_on(id, credit) then
    num_taken = num_taken + redis.call('HDEL', credits, id)
  end
end
return { page[1], num_taken }
