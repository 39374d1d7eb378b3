#!lua flags=allow-oom
-- Takes entries of a stage: guarantees that whatever it returns is pending for this consumer, carries this
-- call's nonce and is counted as a try, all in one step, so that no entry is ever delivered but unclaimed.
-- Sent again with the same nonce after a lost reply, it returns what the lost reply held. Of each stream, in
-- order of priority: entries that were handed back, then entries whose lease ran out, then new ones.
-- Creates a missing group at 0, so that entries added before it are delivered.
--
-- KEYS  for each stream, in order: stream, claims, tries
-- ARGV  group, consumer, handback consumer, nonce, max_items, lease_ms, '1' if sent again,
--       then for each stream the cursor of its sweep for ended leases, '' for no sweep now
-- reply { entries {stream number, id, payload, tries}, cursors, last delivered ids (when there are no entries) }
local group, consumer, handback, nonce = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local room, lease_ms, resent = tonumber(ARGV[5]), ARGV[6], ARGV[7] == '1'
local MAX_OWN = 1000 -- more than any process holds
local MAX_PAYLOAD = 33554432 -- as wire.py: nobody reads a larger one, and sending it would take longer than an answer may
local STUB = 1024 -- so much of it is enough for a dead letter
local MAX_PASSES = 10 -- each pass of a sweep looks at up to ten times its count; the cursor remembers the rest
local found = {}

-- include: held.lua

local function add(s, entry, tries)
  local payload = entry[2][2] or ''
  if #payload > MAX_PAYLOAD then
    payload = string.sub(payload, 1, STUB)
  end
  found[#found + 1] = { s.number, entry[1], payload, tries }
  room = room - 1
end

local function claim(s, entries)
  for _, entry in ipairs(entries) do
    redis.call('HSET', s.claims, entry[1], nonce)
    add(s, entry, redis.call('HINCRBY', s.tries, entry[1], 1))
  end
end

local function pending_ids(s, count, owner)
  local ids = {}
  for _, row in ipairs(redis.call('XPENDING', s.stream, group, '-', '+', count, owner)) do
    ids[#ids + 1] = row[1]
  end
  return ids
end

local function ensure_group(s)
  local probe = redis.pcall('XPENDING', s.stream, group)
  if probe.err then
    redis.call('XGROUP', 'CREATE', s.stream, group, '0', 'MKSTREAM')
  end
end

local function take_lost_reply(s)
  for _, id in ipairs(pending_ids(s, MAX_OWN, consumer)) do
    local lost = same_claim(redis.call('HGET', s.claims, id), nonce)
    if lost and room <= 0 then -- this call asks for less than the one whose reply was lost
      release(s.stream, s.claims, s.tries, group, id, handback)
    elseif lost then
      for _, entry in ipairs(redis.call('XCLAIM', s.stream, group, consumer, 0, id)) do
        add(s, entry, tonumber(redis.call('HGET', s.tries, id)) or 1)
      end
    end
  end
end

local function take_handed_back(s)
  local ids = pending_ids(s, room, handback)
  if #ids > 0 then
    claim(s, redis.call('XCLAIM', s.stream, group, consumer, 0, unpack(ids)))
  end
end

-- A sweep that goes on from an earlier call begins again at the start when it has come to the end, so that no
-- new entry overtakes one whose lease ended meanwhile before the cursor.
local function take_expired(s)
  local passes, rounds_left = 0, s.cursor == '0-0' and 1 or 2
  repeat
    local reply = redis.call('XAUTOCLAIM', s.stream, group, consumer, lease_ms, s.cursor, 'COUNT', room)
    s.cursor = reply[1]
    claim(s, reply[2])
    for _, id in ipairs(reply[3]) do -- entries that somebody deleted without acknowledging them
      redis.call('HDEL', s.claims, id)
      redis.call('HDEL', s.tries, id)
    end
    passes = passes + 1
    if s.cursor == '0-0' then
      rounds_left = rounds_left - 1
    end
  until room <= 0 or rounds_left == 0 or passes == MAX_PASSES
end

local function take_new(s)
  local reply = redis.call('XREADGROUP', 'GROUP', group, consumer, 'COUNT', room, 'STREAMS', s.stream, '>')
  if reply then
    claim(s, reply[1][2])
  end
end

local function last_delivered_id(s)
  for _, row in ipairs(redis.call('XINFO', 'GROUPS', s.stream)) do
    local fields = {}
    for i = 1, #row, 2 do
      fields[row[i]] = row[i + 1]
    end
    if fields['name'] == group then
      return fields['last-delivered-id']
    end
  end
end

local streams = {}
for number = 1, #KEYS / 3 do
  local k = 3 * (number - 1)
  streams[number] = {
    number = number, stream = KEYS[k + 1], claims = KEYS[k + 2], tries = KEYS[k + 3], cursor = ARGV[7 + number],
  }
  ensure_group(streams[number])
end

if resent then
  for _, s in ipairs(streams) do
    take_lost_reply(s)
  end
end

for _, s in ipairs(streams) do
  if room > 0 then
    take_handed_back(s)
  end
  if room > 0 and s.cursor ~= '' then
    take_expired(s)
  end
  if room > 0 then
    take_new(s)
  end
end

local cursors, bells = {}, {}
for number, s in ipairs(streams) do
  cursors[number] = s.cursor
  if #found == 0 then
    bells[number] = last_delivered_id(s)
  end
end
return { found, cursors, bells }
