-- Shared by the scripts that look at work streams; the loader puts it where they say `-- include: queue_state.lua`.
-- Reads lengths and ids only: no payload leaves the server.
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)

-- Returns how many entries consumers hold, and how many consumers those are.
local function holders(stream, group, handback)
  local pending = redis.pcall('XPENDING', stream, group)
  if pending.err or not pending[4] then -- nobody has read it yet, or nobody holds anything
    return 0, 0
  end
  local num_held, num_holders = 0, 0
  for _, row in ipairs(pending[4]) do
    if row[1] ~= handback then
      num_held, num_holders = num_held + row[2], num_holders + 1
    end
  end
  return num_held, num_holders
end

-- Returns the number of entries and the four numbers of queue_state.py as a text; nothing for an empty stream.
local function queue_state(stream, group, handback)
  local oldest = redis.call('XRANGE', stream, '-', '+', 'COUNT', 1)[1]
  if not oldest then
    return 0
  end
  local num_entries = redis.call('XLEN', stream)
  local num_held, num_holders = holders(stream, group, handback)
  local age_ms = math.max(0, now_ms - tonumber(string.match(oldest[1], '^%d+')))
  return num_entries, string.format('%d %d %d %d', num_entries, num_held, num_holders, age_ms)
end
